"""Work that the service does itself for a tenant who may be away: deterministic plans over the journal."""
