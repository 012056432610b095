"""Defects of SGLang itself that this work met, each as a codemod of the installed release. Not part of the runtime."""
