"""Operations and their outcomes, lanes and turns, leases: what the queue is made of."""
