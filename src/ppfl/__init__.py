"""Population personalized federated learning."""
