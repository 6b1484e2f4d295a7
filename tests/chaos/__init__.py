"""What clients see when any part of the service dies, stands still, or loses its link, its disk or its clock."""
