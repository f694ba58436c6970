"""The one room that knows TransformerLens, module trees and the files of models."""
