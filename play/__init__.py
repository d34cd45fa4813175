"""The page to watch and play: games that a visitor can edit, their record, and the server."""
