"""What keeps the store clean: overdue work, blobs nobody refers to, a count of it all."""
