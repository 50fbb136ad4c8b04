"""The study of a labelled corpus: methods side by side, tuned by cross-validation over respondents, and a report."""
