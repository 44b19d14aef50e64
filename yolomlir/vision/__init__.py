"""Images in and annotated images out."""
