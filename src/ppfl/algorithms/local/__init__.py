"""What methods share on a client: batches, local SGD, membership steps."""
