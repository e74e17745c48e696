"""Files of a tenant: sent, checked, brought back."""
