"""Who uses the service: tenants, keys, sessions, usage, audit."""
