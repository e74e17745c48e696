"""Conversations to token rows, and back."""
