"""Where a number left its dtype's range: trail, culprit, remedy, message."""
