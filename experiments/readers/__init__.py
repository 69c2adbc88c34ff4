"""Readers of data for the experiments beside this folder, named as "readers.stackexchange:read"."""
