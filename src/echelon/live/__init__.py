"""Live trading: feed, gate, journal, risk gate and brokers around the decision engine."""
