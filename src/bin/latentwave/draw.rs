//! How plots look: colours, type, titles, numbers on axes.

use std::error::Error as StdError;

use plotters::coord::Shift;
use plotters::prelude::*;

/// A part of a drawing.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Result of drawing; it cannot fail on finite numbers.
pub(crate) type Drawn = Result<(), Box<dyn StdError>>;

pub(crate) const INK: RGBColor = RGBColor(0x1b, 0x23, 0x30);
pub(crate) const MUTED: RGBColor = RGBColor(0x6b, 0x76, 0x86);
pub(crate) const GRID: RGBColor = RGBColor(0xe9, 0xed, 0xf3);
pub(crate) const BLUE: RGBColor = RGBColor(0x2f, 0x6b, 0xd8);
pub(crate) const PALE: RGBColor = RGBColor(0xf4, 0xb8, 0x88);
pub(crate) const TEAL: RGBColor = RGBColor(0x17, 0x94, 0x87);
pub(crate) const ORANGE: RGBColor = RGBColor(0xe0, 0x6c, 0x1f);

const FONT: &str = "Inter, Segoe UI, Helvetica, Arial, sans-serif";

pub(crate) fn font(size: u32, color: &RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(color)
}

/// Writes a panel's title and the line under it, and returns the room below.
pub(crate) fn titled<'a>(area: &Area<'a>, title: &str, note: &str) -> Result<Area<'a>, Box<dyn StdError>> {
    let bold = (FONT, 20, FontStyle::Bold).into_font().color(&INK);
    area.draw(&Text::new(title.to_owned(), (24, 14), bold))?;
    area.draw(&Text::new(note.to_owned(), (24, 38), font(15, &MUTED)))?;
    Ok(area.margin(62, 8, 14, 20))
}

/// A key of colours at the right of a panel's title.
pub(crate) fn key(area: &Area<'_>, entries: &[(&str, RGBColor)]) -> Drawn {
    let mut x = area.dim_in_pixel().0 as i32 - 24;
    for (name, color) in entries.iter().rev() {
        x -= 7 * name.chars().count() as i32 + 32;
        area.draw(&Rectangle::new([(x, 17), (x + 11, 28)], color.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (x + 17, 16), font(15, &MUTED)))?;
    }
    Ok(())
}

/// A number on an axis: short above a thousand.
pub(crate) fn tick(number: f64) -> String {
    match number.abs() {
        x if x >= 1e6 => format!("{}M", (number / 1e4).round() / 100.0),
        x if x >= 1e3 => format!("{}k", (number / 1e2).round() / 10.0),
        0.0 => "0".to_owned(),
        x if x >= 10.0 => format!("{number:.0}"),
        x if x >= 0.01 => format!("{}", (number * 100.0).round() / 100.0),
        _ => format!("{number}"),
    }
}
