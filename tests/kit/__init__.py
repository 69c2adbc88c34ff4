"""What several tests build with: data, networks, runs, twins, sites, files. No test imports another test."""
