"""Groups of parameters, each declared once in its annotation; a body is made of the groups that it has."""
