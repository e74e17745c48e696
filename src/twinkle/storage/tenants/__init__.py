"""Who uses the service: tenants with their keys and limits, sessions, what was used and done."""
