"""Networks: encoders of the market, and the actors and critics on top of them."""
