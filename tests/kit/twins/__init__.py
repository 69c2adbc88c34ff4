"""Every method again, written plainly from its paper's pseudocode: what the package must agree with."""
