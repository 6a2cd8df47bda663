"""Floor 4: who runs where, what happened, what does the user see?"""
