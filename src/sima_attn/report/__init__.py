"""What every package that measures or plots uses: rows, tables, figures, timing, progress bars."""
