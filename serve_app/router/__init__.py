"""THE STORY OF ONE REQUEST: admit, lower, fan out, merge, render; and the fleet it goes to. No Ray, torch or HTTP."""
