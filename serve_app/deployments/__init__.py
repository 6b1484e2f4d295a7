"""THE WALLS: Ray and Starlette live here and nowhere else; thin, decides nothing."""
