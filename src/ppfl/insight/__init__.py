"""What a fitted population is good for beyond its own clients: clients that come later, and training that goes on."""
