"""Code that several rules use: groups of broken contracts, sets of weights, costs, and the words of findings."""
