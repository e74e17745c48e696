"""What is judged before a request is accepted: limits, what the mesh offers, sizes."""
