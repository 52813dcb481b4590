"""What rules are made of: groups of broken contracts, weights, costs, words."""
