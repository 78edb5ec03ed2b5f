"""A measured service as a simulated one: which deployment it was, what it was asked, and where its time goes."""
