"""The same experiments over sites that keep their data, on Flower: the server, the sites, and what may leave them."""
