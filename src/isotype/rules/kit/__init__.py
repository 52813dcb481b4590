"""Code that rules share: groups of broken contracts, sets of weights, costs, and the wording of findings."""
