"""Many adapters on one frozen base model, computed together: exact, packed, each job for itself."""
