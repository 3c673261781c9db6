"""How machines are drawn and filmed."""
