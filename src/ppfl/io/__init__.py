"""What is read and written outside of the program: text from outside, made safe to show, and HTML made of it. Imports
nothing else of ours."""
