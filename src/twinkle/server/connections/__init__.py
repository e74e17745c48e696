"""What lies between a socket and a handler."""
