"""When work runs relative to forward and backward. Every schedule gives the same bits."""
