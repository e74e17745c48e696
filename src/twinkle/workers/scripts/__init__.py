"""What clients of the Twinkle dialect call on a run, by the code that scripts have for it."""
