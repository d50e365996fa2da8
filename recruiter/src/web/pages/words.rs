//! Text of the database, for pages. Templates escape what is HTML; here it is cut, and what would steer the direction of writing is shown.

use recruiter_common::text::printable;
use serde::Serialize;

/// Maximum size in bytes of one text in a page. Longer ones are in the JSON of the job.
const LONGEST: usize = 32 * 1024;

/// A text of many lines.
pub(super) struct Block {
    pub(super) text: String,
    pub(super) is_cut: bool,
}

impl Block {
    pub(super) fn of(text: &str) -> Self {
        let is_cut = text.len() > LONGEST;
        let begin = &text[..text.floor_char_boundary(LONGEST)];
        let lines: Vec<String> =
            begin.split('\n').map(|line| printable(&line.trim_end_matches('\r').replace('\t', "    "), LONGEST)).collect();
        Self { text: lines.join("\n"), is_cut }
    }

    pub(super) fn of_json(value: &impl Serialize) -> Self {
        Self::of(&serde_json::to_string_pretty(value).unwrap_or_default())
    }
}

/// JSON for a field that is edited. What [`printable`] would not show as it is, is escaped: it comes back as it was.
pub(super) fn editable(value: &impl Serialize) -> String {
    let mut text = String::new();
    for character in serde_json::to_string_pretty(value).unwrap_or_default().chars() {
        if character == '\n' || printable(character.encode_utf8(&mut [0; 4]), 8).chars().eq([character]) {
            text.push(character);
        } else {
            text += &format!("\\u{:04x}", u32::from(character));
        }
    }
    text
}

/// A path with a query of these parameters, without those that are empty.
pub(super) fn link<'a>(path: &str, parameters: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let given: Vec<(&str, &str)> = parameters.into_iter().filter(|(_, value)| !value.is_empty()).collect();
    let query = serde_urlencoded::to_string(given).unwrap_or_default();
    if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
}

/// A count that may be higher.
pub(super) fn at_least(count: u64, has_more: bool) -> String {
    if has_more { format!("{count}+") } else { count.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_keeps_its_lines_and_shows_what_is_hidden() {
        let block = Block::of("a\r\n\tb\u{202e}c\u{1b}[2J");
        assert_eq!((&*block.text, block.is_cut), ("a\n    b\\u{202e}c\\u{1b}[2J", false));
        let long = Block::of(&"ü".repeat(1 << 20));
        assert!(long.is_cut && long.text.len() <= LONGEST);
    }

    #[test]
    fn what_is_edited_comes_back_as_it_was() {
        let value = serde_json::json!({ "a\u{202e}": ["\u{85}ü😀\n\\", "</textarea>"] });
        let text = editable(&value);
        assert!(text.contains("a\\u202e") && text.contains("\\u0085ü😀") && text.contains('\n'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_link_has_what_is_given() {
        assert_eq!(link("/jobs", [("class", "a&b=c\"<"), ("group", "")]), "/jobs?class=a%26b%3Dc%22%3C");
        assert_eq!(link("/jobs", [("group", "")]), "/jobs");
    }
}
