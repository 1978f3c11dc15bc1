"""The dump directory as hsx sees it: waiting for dumps, mapping them, measuring their content."""
