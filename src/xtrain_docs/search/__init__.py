"""What the search of the site knows: sections of pages, and how people write things."""
