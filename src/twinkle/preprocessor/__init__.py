"""What a data set's columns become before a template sees them."""
