"""THE STORY OF ONE REQUEST: lower, fan out, merge, render. No Ray, no torch, no HTTP."""
