"""What a process needs whatever it is for: its log, its children, what it may load and whom it trusts."""
