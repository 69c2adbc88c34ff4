"""The same experiment on real machines: keys and certificates, folders to hand to sites, sums that only their total
can be read of. flwr is imported here and nowhere else."""
