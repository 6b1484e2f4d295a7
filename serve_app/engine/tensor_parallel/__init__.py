"""One model in several processes of a node: how it is divided, who computes what, and what they tell each other."""
