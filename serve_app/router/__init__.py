"""Router: admits one request, lowers it, fans it out, merges and renders answers. Knows no Ray, torch or HTTP."""
