"""THE WALLS OF RAY: what Ray Serve holds and calls, and how calls cross from a router to a replica; decides nothing."""
