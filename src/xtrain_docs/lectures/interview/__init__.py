"""What the pages of the interview compute: the scenarios, and the formula sheet."""
