"""How answers, prints and asserts of a program are judged: values are compared, and shown in a line."""
