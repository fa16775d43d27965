"""Calculators that pages show: forms whose answers Python computes in the browser.

    ```calculator pipeline ranks=4
    The caption, as Markdown.
    ```

`forms` says what a reader may enter, `answers` computes; both need the standard library
and the torch-free parts of `xtrain` alone, and the same files run at build, in the
tests and in the page (`pyodide`). The page holds the answer for the values it was built
with, so a reader without scripts sees that one.
"""
