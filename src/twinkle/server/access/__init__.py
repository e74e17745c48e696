"""Who may ask for what: keys, tokens, scopes, and all that is signed or sealed."""
