"""The report of `bench decode`: one page of HTML with plots, which needs no other file."""
