"""Keys of providers: kept sealed, handed out by rule, never shown again."""
