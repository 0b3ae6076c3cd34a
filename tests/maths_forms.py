r"""Forms of an answer, right and wrong, that a policy writes: templates times answers.

`gsm8k_cases` and `boxed_cases` give (reply, answer, is_right). They were written before the
checkers that they judge, from what models write and from what an optimizer would try.
"""

from collections.abc import Iterator

Case = tuple[str, str, bool]

# GSM8K. {n} is the answer, {m} another number, {double} twice the answer.

NUMBERS = ["5", "72", "18", "240", "3", "6000", "42", "96", "12"]
RIGHT_FIELDS = r"""
{n}
{n}.
+{n}
{n}.0
{n}.00
${n}
$ {n}
\${n}
${n}.00
€{n}
£{n}
US${n}
{n} USD
${n} per day
{n} dollars
{n} dollars.
{n} apples
{n} apples.
{n} apples left
{n} Apples!
{n} hours in total
{n} miles per hour
{n} km/h
{n} square feet
{n} sq. ft.
{n} cm^2
{n} cm²
{n} m³
{n} kg
{n}kg
{n} m
{n} years old
{n} students' books
{n} times
{n} (apples)
{n} °C
{n}°
{n} degrees
({n})
"{n}"
**{n}**
**{n}** apples
**{n} apples**
*{n}*
__{n}__
`{n}`
${n}$
$${n}$$
$ {n} $ apples
\({n}\)
\[{n}\]
\boxed{{{n}}}
\boxed{{{n}}}.
\boxed {{{n}}}
$\boxed{{{n}}}$
$\boxed{{\${n}}}$
\boxed{{{n}\text{{ apples}}}}
\text{{{n}}}
\mathbf{{{n}}}
{n}\text{{ apples}}
{n} \text{{ cm}}^2
{n}^\circ
\frac{{{double}}}{{2}}
\dfrac{{{double}}}{{2}}
{double}/2
{n}/1
x = {n}
x={n}
$x = {n}$
\(x = {n}\)
= {n}
Total = {n}
Total: {n}
Answer: {n}
ANSWER: {n}
**Answer:** {n}
Answer: **{n}**
Final answer: {n}
The answer is {n}
The answer is {n}.
The answer is: {n}
The answer is ${n}.
The answer is **{n}**.
The answer is $\boxed{{{n}}}$.
The final answer is {n}.
The final answer is: $\boxed{{{n}}}$
The correct answer is {n} apples.
So the answer is {n}.
So, the answer is {n} hours.
Therefore, the answer is {n}.
Thus the total is {n}
It is {n}.
It's {n}.
She has {n} apples left.
There are {n} apples.
They need {n} hours.
He earns ${n} a week.
The total cost is ${n}.
{wide}
{wide} apples
x = {wide}
{zero_width}{n}
{n}{zero_width}
{mark}{n}
{no_break}{n}
{n}{no_break}apples
{thin}{n}
""".strip().splitlines()
WRONG_FIELDS = r"""
-{n}
−{n}
–{n}
—{n}
﹣{n}
－{n}
‐{n}
‑{n}
⁻{n}
-${n}
$-{n}
−${n}
$−{n}
(-{n})
(−{n})
-{n} apples
−{n} apples
$-{n}$
**-{n}**
**−{n}**
x = -{n}
x = −{n}
The answer is -{n}.
The answer is −{n}.
\boxed{{-{n}}}
\boxed{{−{n}}}
minus {n}
negative {n}
{zero_width}−{n}
{no_break}−{n}
-{wide}
－{wide}
√{n}
∛{n}
√({n})
\sqrt{{{n}}}
\sqrt {n}
$\sqrt{{{n}}}$
\sqrt[3]{{{n}}}
sqrt({n})
sqrt {n}
the square root of {n}
{n}√2
{n}\sqrt{{2}}
< {n}
> {n}
<{n}
>{n}
≤ {n}
≥{n}
≠ {n}
!= {n}
\le {n}
\geq {n}
\neq {n}
$\ge {n}$
x > {n}
x < {n}
x ≥ {n}
x ≤ {n}
x ≠ {n}
x != {n}
$x \ge {n}$
{n} < x
{n} > x
at least {n}
at most {n}
more than {n}
less than {n}
fewer than {n}
over {n}
under {n}
up to {n}
not {n}
The answer is not {n}.
The answer isn't {n}.
never {n}
{n}+
{n} or more
{n} or less
{n} and up
{n} at most
{n} at least
{n} is wrong
{n} is not the answer
≈ {n}
~{n}
~ {n} apples
about {n}
approximately {n}
roughly {n}
around {n}
almost {n}
maybe {n}
{n} maybe
±{n}
\pm {n}
{n}^2
{n}²
{n}³
{n}⁻¹
{n}**2
{n}^{{2}}
{n}^{{-1}}
${n}^2$
({n})^2
({n})²
{n} squared
{n} cubed
{n}!
{n} factorial
{n}e3
{n}E5
{n} x 10^3
{n} × 10³
{n} \times 10^3
10^{n}
10^{{{n}}}
2^{n}
e^{n}
1/{n}
\frac{{1}}{{{n}}}
\frac{{{n}}}{{7}}
{n}/7
log {n}
log({n})
\ln {n}
sin {n}
f({n})
{n}i
{n}x
{n}n
{n}π
{n} π
{n}\pi
π{n}
{n} thousand
{n} thousands
{n} Thousand dollars
{n} million
{n} billion
{n} trillion
{n} hundred
{n} dozen
{n} dozens
{n} dozen eggs
{n} gross
{n} lakh
{n}%
{n} %
{n}\%
{n}％
$ {n}\% $
{n} percent
{n} per cent
{n}‰
{n}k
{n}K
{n}M
{n}m dollars
{n}bn
${n}k
${n}M
${n} m
${n} million
${n} thousand
**{n}** thousand
**{n}**%
\boxed{{{n}}} thousand
\boxed{{{n}\%}}
The answer is {n} thousand.
The answer is {n}%.
x = {n} million
{n}\text{{ million}}
{n} thousandths
{n} hundredths
{n} tenths
{n} thirds
{n} halves
{n} quarters
half of {n}
a third of {n}
twice {n}
double {n}
{n} doubled
a dozen {n}
{n} and a half
{n} 1/2
{n}½
{n} ½
{n}\frac{{1}}{{2}}
{n} \frac12
{n}.5
{n},5
0.{n}
.{n}
{n}0
1{n}
{m}
{n} or {m}
{m} or {n}
{n}, {m}
{m}, {n}
{n},{m}
{n} and {m}
{n} & {m}
{n}-{m}
{n}–{m}
{n} - {m}
{n} to {m}
{n}/{m}
{n}:{m}
{n} {m}
{m} {n}
{n}{thin}{m}
{n}{zero_width}{m}
{n}{no_break}{m}
{n} = {m}
{m} = {n}
x = {n} = {m}
x = {m}, y = {n}
{n} + {m}
{n} * {m}
{n} × {m}
{n} · {m}
{n}; {m}
{n} | {m}
{n} (or {m})
{n} not {m}
({n}, {m})
[{n}, {m}]
{{{n}, {m}}}
${n}$ or ${m}$
**{n}** or **{m}**
**{n}** **{m}**
\boxed{{{n}}}\boxed{{{m}}}
\boxed{{{m}}} {n}
\boxed{{{m}}}{n}
7\text{{{n}}}
\text{{{n} or {m}}}
{n} or seventy
{n} or so
{n} or maybe eleven
seventy or {n}
{n}, or seventy
{n} apples, maybe seventy
{n} plus one
{n} minus one
{n} minus ten apples
{n} times three
{n} out of ten
{n} more than ten
{n} below zero
{n} over two
{n} with a remainder
{n}...
{n}…
{n}?
{n} ?
Is it {n}?
I am not sure, {n}
Step {n}
#{n}
No. {n}
A{n}
x{n}
x_{n}
{n}_8
{n}₈
{n} mod 3
{n}:30
{n}°30'
{n} base nine
2x = {n}
x^2 = {n}
-x = {n}
x/2 = {n}
1/x = {n}
√x = {n}
|x| = {n}
x + 1 = {n}
f(x) = {n}

unknown
nan
""".strip("\n").splitlines()
# Of the answer 5, written after the checker, to see what the lists above did not ask.
MORE_RIGHT = r"""
5 apples
5 minutes
5 min
5 hrs
5 lbs.
5 mph
5 m/s
5 m²
5 ft.
5 in.
5 miles/hour
5 apples per person
5 more apples
5 fewer apples
5 red balls
5 bags of rice
$5 each
$5/hour
$5 more
5 cents
£5 per kg
5 euros
5€
5 €
5£
5 people were left
5 days.
5 weeks and
5 boys (total)
**5** dollars
**$5**
$\mathbf{5}$
$5\text{ dollars}$
\$5
$5\$
The answer is: **5**
**The answer is 5**
**Final Answer:** 5
Final Answer: $5$
Answer = 5
ans: 5
Ans = 5
x=5
n = 5
$n = 5$
Therefore 5
So 5
= $5
She makes $5 every day.
Janet makes $5 every day.
They have 5 apples left.
It takes 5 bolts.
He runs 5 meters a week
Jill paid $5
The total is 5
Total cost: $5
The result is 5.
Thus, x = 5.
5
5
5\,
5\ \text{cm}
\( 5 \)
\boxed{5}.
\boxed{5 \text{ apples}}
\boxed{\$5}
\boxed{x = 5}
$$\boxed{5}$$
\[ \boxed{5} \]
5.00 dollars
05
5.000
5 / 1
10/2
\frac{10}{2}
\frac{5}{1}
five (5)
5 (five)
'5'
"5"
“5”
_5_
5 eggs
5 years-old
5-year
5 children's books
5 girls’ hats
5° Celsius
5 degrees Fahrenheit
5 litres
5L
5 L
5ml
5mL
5cm
5 km
5kg
5g
5 g
5s
5 s
5h
5 sq ft
5 cubic meters
5 cu. ft.
5 square units
5 u^2
5 km^2
5 cm³
5 times as many
5 times
5 in total
5 total
5 altogether
5 left over
5 remaining
５
５個
5 個
5 apples 🍎
✅ 5
5 ✓
👉 5
""".strip("\n").splitlines()
MORE_WRONG = r"""
-   5
- 5
+-5
5 and 1/2
5 to the power of 2
5 raised
5^x
5^n
5↑2
5 · 10
5(2)
5[6]
(5)(6)
5*2
5 by 6
5 × 6 apples
5 with 6 left
5 6/7
5 feet 6 inches
5'6"
5:00
5 o'clock
5 million dollars
5 mill
5 bil
$5B
$5 B
5 tn
5 thousand and six
5%-6%
5 basis points
5 pct.
5 percents
5 hundredths
5 over 7
5 ÷ 2
5 mod two
5 base two
0b5
0x5
5h6
5E
5i
5j
5 j
√ 5
³√5
∜5
root 5
sqrt5
sqrt[5]
5^(1/2)
5**0.5
5**(1/2)
exp(5)
e5
ln5
log2 5
<=5
>=5
=<5
≦5
≧5
⩾5
≯5
≮5
5≤
5<
5>
>5 apples
5 ≤ x
x∈5
x→5
→ 5
5→6
5⇒6
[5,6]
{5}
5∨6
5 xor 6
5 / 6
5//6
five
V
5V
5 apples or 6
5 apples and 6 pears
5 apples and pears
5 apples?
5 apples??
5, no
5; no
5 - no
5 — no
no, 5
No: 5
wrong: 5
maybe: 5
~5
∼5
≅5
≃5
5ish
5-ish
5 -ish
5–
5-
5--
5.5.
5..
.5
5 .5
5. 5
5,
5,,
,5
'5
5''
5 minus 1
5 less two
5 fewer than x
5 more than x
almost 5
just under 5
between 5 and 6
5ers
5th
5th apple
the 5th
5es
5 x
5 X
5 y
5 a
a 5
A 5
5 b
5 z
5z
z5
x5
5 of 6
5 of six
5 in six
5 or
or 5
and 5
vs 5
5 vs
−$5
$−5
–$5
-€5
€-5
(5
5)
)5(
((5))
(-5)
(−5)
5⁺
5₂
₅
⁵
⑤
5️⃣
5̅
5̇
٥
५
五
5․
5·6
5‚6
5،6
5٫6
5 million
5Million
5-million
5millions
5+0i
5+
+ 5 +
5 + x
5±0
5+/-1
5 (±1)
5 (approx.)
5 (est)
5 (maybe)
5 (?)
5 (not final)
5 (wrong)
5*
*5
5^
^5
5#
5 #
@5
&5
5&
5\times 2
5\cdot 2
5\div 2
5 \pm 1
\infty 5
5\infty
5 \%
\frac5
\frac{5}
\frac{5}{0}
5/0
0/5
5/
/5
5/x
x/5
NaN 5
5 nan
5 infinity
infinite 5
inf
5e0
5e+0
5.0e1
-5.
-5 apples
−5 apples.
The answer is −5 apples
the answer is minus 5
The answer: negative 5
negative five
x = –5
x=-5
x≠5
x≥5
x>=5
x=>5
x =/= 5
x <> 5
x ~ 5
x ≈ 5
x ∝ 5
x ≡ 5 mod 7
x := 5 or 6
2x = 5
x+1=5
x1 = 5
x₁ = 5
x_1 = 5, x_2 = 6
y = 5 or 7
x = 5y
x = 5 y
x = 5²
x = √5
x = 1/5
x = 5/2
1 / 5
5 below
5 under par
5 short
5 squared meters
double 5
5 doubled apples
5 pairs of 2
5 groups of 4
5 C 2
5!
5! apples
5 !
!5
5 factorials
half 5
5 half
5 halves
5 and half
5 quarters
5 dimes 2
quarter of 5
10 - 5
10-5
10–5
5 = 6
6=5
6 → 5
6, 5
6 5
not-5
non-5
un 5
anything but 5
anything except 5
everything but 5
at 5 or above
5 at minimum
minimum 5
max 5
max(5,1)
≥5 apples
> 5 apples
5 apples at least
5k apples
5K miles
5 k
5 K
5 M
5 G
5 kilo
5 mega
5 giga
5G
5T
5 T
""".strip("\n").splitlines()
EXTRA_FIELDS = [  # (answer, right fields, wrong fields)
    (
        "-5",
        ["-5", "−5", "–5", "－5", "-$5", "$-5", "x = −5", "The answer is −5.", r"\boxed{-5}"],
        ["5", "+5", "--5", "5-", "- -5", "−−5", "(5)", "√-5", "-5²", "-5 thousand", "|-5|"],
    ),
    (
        "7.5",
        ["7.5", "7.50", "$7.50", "7 1/2", "7½", "7 ½", "15/2", "7 1/2 hours", "x = 7½", "７.５"]
        + [r"7\frac{1}{2}", r"7 \frac12", r"$7\frac{1}{2}$", r"\frac{15}{2}", "7.5 miles", "7.5."],
        ["71/2", "7/12", "7 1/3", "-7 1/2", "−7½", "7 -1/2", "7 1 / 2 3", "75", "7", "7,5", "17½"]
        + ["7.5 %", "7.5 million", "7.5.1", "7..5", "7 5", "7 3/2", "7½²", "7 1/2 or 8", "√7½"],
    ),
    (
        "5000",
        ["5,000", "5 thousand", "5 thousand dollars", "$5 thousand", "50 hundred", "5{,}000"]
        + [r"5\,000", "5\u2009000", "5\u202f000", "５，０００", "$5,000.00", r"\$5,\!000"],
        ["5,00", "5,0000", "5 000 or 6", "5,000 thousand", "5.000", "5 thousands", "5000 000"],
    ),
    (
        "2500000",
        ["2,500,000", "2.5 million", "$2.5 million", "2.5 million people", "2\u202f500\u202f000"],
        ["2.5", "2.5 billion", "2,500,00", "2,500,000 million", "2.5 million million"],
    ),
    ("5", MORE_RIGHT, MORE_WRONG),
    ("0", ["0", "$0", "0.0", "0 apples", "x = 0"], ["", "O", "none", "0 or 1", "0/0", "1"]),
]
# {f} is the field, {other} the field of another answer.
RIGHT_REPLIES = [
    "#### {f}",
    "So it is.\n\n#### {f}\n",
    "####{f}\nI hope that this helps.",
    "<think>Perhaps #### {other}.</think>\n#### {f}",
    "Perhaps #### {other}</think>\n\nSo\n#### {f}",
    "#### {other}\nNo:\n#### {f}",
]
WRONG_REPLIES = [
    "{f}",
    "### {f}",
    "#### \n",
    "<think>#### {f}",
    "<think>#### {f}</think>",
    "<think>So\n#### {f}\n</think>\nI do not know.",
    "So\n#### {f}\n</think>\nI do not know.",
    "<think>a</think><think>#### {f}</think> It is so.",
    "<think>#### {f}</think>\n#### {other}",
    "#### {f}\nNo:\n#### {other}",
]


def gsm8k_cases() -> Iterator[Case]:
    for answer in NUMBERS:
        values = {
            "n": answer,
            "m": str(int(answer) + 1),
            "double": str(2 * int(answer)),
            "wide": "".join(chr(ord(digit) + 0xFEE0) for digit in answer),
            "zero_width": "\u200b",
            "mark": "\ufeff",
            "no_break": "\u00a0",
            "thin": "\u2009",
        }
        for template in RIGHT_FIELDS:
            yield f"#### {template.format(**values)}", answer, True
        for template in WRONG_FIELDS:
            yield f"#### {template.format(**values)}", answer, False
        replies = {"f": answer, "other": values["m"]}
        for template in RIGHT_REPLIES:
            yield template.format(**replies), answer, True
        for template in WRONG_REPLIES:
            yield template.format(**replies), answer, False
    for answer, right, wrong in EXTRA_FIELDS:
        for field in right:
            yield f"#### {field}", answer, True
        for field in wrong:
            yield f"#### {field}", answer, False


# Mathematics in \boxed{}: (answer, right fields, wrong fields)

BOXED = [
    ("5", ["5.0", "+5", "x = 5", "５", r"\text{5}", r"\frac{10}{2}", r"\sqrt{25}", "2+3"], []),
    ("72", ["72.", r"\mathbf{72}", "７２", "{72}", r"72 \text{ apples}", r"8 \cdot 9"], []),
    ("-3", ["−3", "–3", "－3", "- 3", "{-3}", r"-\frac{6}{2}"], ["3", "+3", "3-", "|-3|"]),
    (
        "1234567",
        ["1,234,567", r"1\,234\,567", r"1{,}234{,}567", r"1,\!234,\!567", r"1\;234\;567"]
        + ["1\u2009234\u2009567", "1\u202f234\u202f567", "1\u00a0234\u00a0567"]
        + [r"1.234567 \times 10^6", r"1.234567 \cdot 10^{6}"],
        ["1.234567", "1,234,56", "1,234,567,000", r"1\,234", "1234,567", r"1{,}234"],
    ),
    ("1024", ["2^{10}", "1,024", r"4^5", "32^2"], ["210", "2^{11}", r"10^{24}", r"2 \cdot 10"]),
    (
        r"\frac{1}{3}",
        ["1/3", r"\dfrac13", r"\tfrac{1}{3}", r"\frac{2}{6}", r"0.\overline{3}", r"0.\bar{3}"]
        + [r"0.\dot{3}", "0.333333", r"{1 \over 3}", r"3^{-1}", "⅓", "1⁄3", r"\frac 1 3"]
        + [r"\cfrac{1}{3}", r"1 \div 3", r"0.3\overline{3}", r".\overline{3}", r"0.\overline3"],
        ["0.3", "0.33", r"0.\overline{4}", "3", r"-\frac13", r"\frac{1}{3}\%", r"33\%", "1.3"]
        + [r"\frac{3}{1}", "⅔", r"3.\overline{3}", r"0.\overline{03}", "13", r"1\frac{1}{3}"],
    ),
    (
        r"\frac{5}{2}",
        ["2.5", "5/2", r"2\frac12", r"2\frac{1}{2}", r"2 \frac{1}{2}", r"2\,\frac{1}{2}", "2 1/2"]
        + ["2½", "2 ½", r"2\dfrac{1}{2}", r"2\tfrac12", r"2 + \frac{1}{2}", r"2.5\text{ cm}"]
        + [
            r"2{\frac{1}{2}}",
            r"2\;\frac{1}{2}",
            r"2~\frac{1}{2}",
            r"2\ \frac{1}{2}",
            r"2.4\overline{9}",
        ],
        ["21/2", r"2\cdot\frac{1}{2}", r"2(\frac12)", r"2\times\frac12", "2", "2/5", r"\frac12"]
        + [r"-2\frac12", r"2\frac13", "2½%", r"2-\frac12", "2 5/2", "25", r"2\frac{1}{2}x"],
    ),
    (
        r"-\frac{7}{4}",
        [
            r"-1\frac{3}{4}",
            "-1.75",
            "-7/4",
            r"\frac{-7}{4}",
            r"\frac{7}{-4}",
            "−7/4",
            "-1 3/4",
            "−1¾",
        ],
        ["1.75", r"-1+\frac{3}{4}", r"1\frac34", r"-\frac{4}{7}", "-1/4", "-7", r"-\frac{7}{-4}"],
    ),
    (
        r"137 \frac{1}{2}",
        ["137.5", r"\frac{275}{2}", r"137\frac12", "137 1/2", "137½", r"137\,\tfrac{1}{2}"],
        ["1371/2", r"137\cdot\frac12", "68.5", "137", r"137\frac{1}{3}", r"137-\frac12"],
    ),
    (
        r"0.\overline{27}",
        [r"\frac{3}{11}", "3/11", r"0.\overline{2727}", r"0.2\overline{72}", "0.272727272727"]
        + [r".\overline{27}", r"0.27\overline{27}"],
        ["0.27", r"0.\overline{72}", "27", r"0.2\overline{7}", r"1.\overline{27}", r"27\%"],
    ),
    (
        r"50\%",
        ["50%", r"50 \%", r"50\,\%", r"50.0\%", r"50\text{ percent}", r"50\text{ \%}", r"$50\%$"],
        ["50", "50.0", r"5\%", r"500\%", r"50^\circ", r"\$50", r"50\text{ cm}", r"0.5\%", r"-50\%"],
    ),
    (r"33\frac{1}{3}\%", [r"33 \frac{1}{3} \%", r"33\tfrac13\%", r"\frac{100}{3}\%"], []),
    ("40", [], [r"40\%", r"40\text{ percent}", r"40\text{ million}", r"40\text{ dozen}", "√40"]),
    (
        r"\sqrt{2}",
        [
            "√2",
            r"\sqrt2",
            r"\sqrt {2}",
            "2^{1/2}",
            r"2^{\frac{1}{2}}",
            r"\frac{2}{\sqrt{2}}",
            "√{2}",
        ]
        + [r"\sqrt[2]{2}", r"2^{0.5}", "√(2)", r"\frac{\sqrt{8}}{2}"],
        [
            "1.41",
            "2",
            r"\sqrt{3}",
            r"-\sqrt{2}",
            r"\pm\sqrt{2}",
            r"\sqrt[3]{2}",
            "-√2",
            "2^2",
            "√2%",
        ],
    ),
    (
        r"3\sqrt{13}",
        [
            "3√13",
            r"\sqrt{117}",
            r"3 \sqrt{13}",
            r"3\cdot\sqrt{13}",
            r"3\,\sqrt{13}",
            r"\sqrt{13}\cdot3",
        ],
        [r"\sqrt[3]{13}", r"3+\sqrt{13}", r"13\sqrt{3}", r"\sqrt{39}", "3", r"-3\sqrt{13}"],
    ),
    (
        r"7\pi",
        ["7π", r"7 \pi", r"\pi \cdot 7", r"7\,\pi", r"7{\pi}"],
        ["7", "21.99", "7p", r"7+\pi"],
    ),
    (
        r"\frac{\pi}{6}",
        [r"\pi/6", "π/6", r"\frac{1}{6}\pi", r"\frac16\pi", r"\dfrac{π}{6}"],
        ["0.52", r"30"],
    ),
    (
        r"90^\circ",
        [
            "90",
            "90°",
            r"90^{\circ}",
            r"90 \text{ degrees}",
            r"90\degree",
            r"90\,^\circ",
            r"90^{\,\circ}",
        ],
        [r"90\%", r"91^\circ", r"-90^\circ", r"9^\circ", r"90^2"],
    ),
    (
        r"\$18.90",
        [
            "18.90",
            "18.9",
            r"\$18.9",
            r"18.90 \text{ dollars}",
            r"\$ 18.90",
            "$18.90",
            r"\text{\$18.90}",
        ],
        [r"18.9 \text{ million}", "1890", r"-\$18.90", r"18.90\%", "18", r"\$18.09"],
    ),
    (
        r"\emptyset",
        [
            r"\varnothing",
            "∅",
            r"\{\}",
            r"\left\{\right\}",
            r"\{ \}",
            r"\left\{ \, \right\}",
            r"\lbrace\rbrace",
        ],
        ["0", r"\{0\}", r"\{\emptyset\}", r"\infty", r"\mathbb{R}", r"\{\varnothing\}", "1"],
    ),
    (
        r"[2,\infty)",
        [
            r"\left[2, \infty\right)",
            r"[2,+\infty)",
            r"[2, ∞)",
            r"x \in [2, \infty)",
            r"[2,\,\infty)",
        ]
        + [
            r"x \ge 2",
            r"x \geq 2",
            r"x\geqslant 2",
            "x ≥ 2",
            r"2 \le x",
            r"[2,\infty[",
            r"\bigl[2,\infty\bigr)",
        ],
        [
            r"(2,\infty)",
            r"(-\infty,2]",
            "x > 2",
            r"[3,\infty)",
            "[2,3)",
            r"x \le 2",
            r"x \geq 3",
            "2",
        ],
    ),
    (
        r"(-\infty, 2) \cup (3, \infty)",
        [
            r"(3,\infty)\cup(-\infty,2)",
            "(-∞,2)∪(3,∞)",
            r"\left(-\infty,2\right)\cup\left(3,\infty\right)",
        ]
        + [r"(-\infty,2)\,\cup\,(3,+\infty)", r"x\in(-\infty,2)\cup(3,\infty)"],
        [
            r"(-\infty, 2] \cup (3, \infty)",
            r"(-\infty, 2) \cap (3, \infty)",
            r"(-\infty, 2)",
            r"(2,3)",
        ],
    ),
    (
        "(3,4]",
        [
            r"\left(3,4\right]",
            "(3, 4]",
            r"3 < x \le 4",
            r"3<x\leq4",
            "]3,4]",
            r"x\in(3,4]",
            r"(3,\;4]",
        ],
        ["[3,4]", "(3,4)", "[3,4)", "(4,3]", r"3 \le x \le 4", r"3 < x < 4", "4", "(3,5]"],
    ),
    (
        r"\{1, 2\}",
        [
            r"\{2, 1\}",
            r"\left\{1,2\right\}",
            r"\{1,\,2\}",
            r"\lbrace 1, 2 \rbrace",
            r"\{\,1, 2\,\}",
        ],
        [r"\{1\}", r"\{1,2,3\}", r"\{1,3\}", "1", "2", r"\{-1,2\}", r"\{12\}"],
    ),
    (
        "(2,-1)",
        [
            "(2, -1)",
            r"\left(2,-1\right)",
            "(2,−1)",
            r"(2,\,-1)",
            "( 2 , -1 )",
            r"\left( 2, \, -1 \right)",
        ],
        ["(-1,2)", "(2,1)", "2", "-1", "(2,-1,0)", "(2)", "(-2,1)"],
    ),
    (
        "1,-2",
        [
            "1, -2",
            "-2, 1",
            r"1 \text{ and } -2",
            r"-2 \text{ or } 1",
            "1, −2",
            r"\{1,-2\}",
            r"x=1, x=-2",
        ],
        ["1", "-2", "1,2", "1,-2,3", r"1 \pm 2", "-1"],
    ),
    (
        "2x+3",
        ["3+2x", "2x + 3", r"2\cdot x+3", "2*x+3", "y = 2x+3", r"2(x+1.5)", r"2\,x+3", r"2x＋3"],
        ["2x-3", "2x+4", "2y+3", "x+3", "2x>3", "2x+3+C", "2x", "3", "x(2+3)", "2X^2+3", "2x+3x"],
    ),
    (
        "x^2-4",
        [
            "(x-2)(x+2)",
            "x^2 − 4",
            "-4+x^2",
            "x^{2}-4",
            "x²-4",
            r"(x-2)\cdot(x+2)",
            r"\left(x-2\right)\left(x+2\right)",
        ],
        ["x^2+4", "(x-2)^2", "x^2-4x", "x-4", "x^2", "x^3-4", "2x-4", "x²-5"],
    ),
    (
        "y = 2x + 3",
        ["y=2x+3", "2x+3", "y = 3+2x", r"y\,=\,2x+3"],
        ["y = 2x - 3", "x = 2y+3", "y = 2x"],
    ),
    (
        "3-4i",
        ["-4i+3", "3 - 4i", "3−4i", r"3-4\,i", r"3-4\cdot i"],
        ["3+4i", "-3+4i", "3", "4-3i", "-1"],
    ),
    (
        r"\text{Evelyn}",
        [
            "Evelyn",
            r"\textbf{Evelyn}",
            r"\mathrm{Evelyn}",
            r"\text{Evelyn }",
            "Evelyn.",
            r"\textit{Evelyn}",
        ],
        [
            "Bob",
            "not Evelyn",
            "Evelyn or Bob",
            r"\text{Evelyn, Bob}",
            r"\text{Evelyn and Bob}",
            "E",
        ],
    ),
    (
        r"\text{(C)}",
        [
            "C",
            "(C)",
            r"\text{C}",
            r"\textbf{(C)}",
            r"\textbf{C}",
            r"\mathrm{(C)}",
            r"\text{(C) }",
            "{C}",
        ],
        ["B", "(D)", "C, D", "C or D", r"\text{(B)}", r"\text{(C) or (D)}", "(B)(C)", "not C"],
    ),
    ("52_8", ["52_{8}", r"52_{\text{8}}", r"52_8."], ["52_7", "52_{9}", "52_{80}", "53_8", "25_8"]),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        [r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"],
        [
            r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}",
            "1",
            "(1)",
        ],
    ),
]
# Written after the checker.
MORE_BOXED = [
    (
        "30",
        [r"\angle ABC = 30^\circ", "a+b=30", r"\vec{v}=30", "x_1 = 30", "f(2)=30", "27+3=30"]
        + [r"30\text{ m}", r"30\text{ min}", r"30\text{ h}", r"\frac{a}{b}=30", "AB = 30"],
        ["a+b=31", "27+3=30=31", r"30\text{ M}", r"30\text{ K}", "30=x=31", "31=x=30"],
    ),
    (
        "5",
        ["5\\text{ inches}"],
        [
            "5 (6)",
            "5 \\text{ (or 6)}",
            "5\\text{ or six}",
            "x=5, y=6",
            "5\\hspace{1cm}6",
            "5 \\mid 6",
            "5\\;\\text{or}\\;6",
            "5 \\vee 6",
            "5 \\cup 6",
            "5\\rightarrow 6",
            "5 : 6",
            "5 \\& 6",
            "\\{5, 6\\}",
            "5 \\sim 6",
            "6 \\approx 5",
            "5\\newline 6",
            "\\text{five or six}",
            "5 \\text{ not } 6",
            "6 = 5",
            "5=6",
            "12345 = 5",
            "5 6",
            "5~6",
            "5\\ 6",
            "5\\,6",
            "5 \\Rightarrow 6",
            "6 \\implies 5",
            "5!",
            "5\\text{ (approximately)}",
            "\\sim 5",
            "\\approx 5",
            "5k",
            "5x",
            "5\\text{k}",
            "5\\text{M}",
            "5e3",
            "5 \\text{ hundred}",
            "5\\text{ dozens}",
            "5\\text{ thousands}",
            "5\\ldots",
            "5...",
            "5?",
            "\\text{at least } 5",
            "\\ge 5",
            "x\\ge5",
            "x>5",
            "\\text{not } 5",
            "\\text{minus }5",
            "|-5|-10",
            "\\text{5, 6}",
            "5\\text{, }6",
            "\\text{5; 6}",
            "5_6",
            "5\\text{ and six}",
            "5\\text{ squared}",
            "\\text{-}5",
            "−5",
            "5^{\\circ}6",
            "5\\phantom{6}",
            "\\cancel{5}6",
            "\\sqrt5",
            "5\\text{ billion dollars}",
            "5 \\pmod 6",
            "5 \\mod 6",
            "5 \\bmod 3",
            "5\\text{ or so}",
            "x \\neq 5",
            "x=5\\text{ is wrong}",
            "5/6",
            "5\\backslash6",
            "5\\%",
            "5‰",
            "5\\text{ per mille}",
            "\\text{between 5 and 6}",
            "5\\pm1",
            "5-6",
            "5 \\to 6",
            "x=5\\text{ or }x=6",
            "5\\text{ or }x",
            "\\boxed{5} \\boxed{6}",
            "5 \\cdot 1 6",
            "5c",
            "5d",
        ],
    ),
    (
        "\\frac{1}{2}",
        [],
        [
            "\\frac{1}{2}\\text{ or }\\frac13",
            "\\frac12,\\frac13",
            "\\frac12=\\frac13",
            "\\frac13=\\frac12",
            "\\frac{1}{2} \\; \\frac13",
            "\\frac12 \\frac13",
            "\\frac{1}{2}\\text{ million}",
            "-\\frac12",
            "\\frac{1}{-2}",
            "\\frac12\\%",
            ".5.5",
            "\\frac{1}{2}!",
            "2\\frac{1}{2}",
            "1\\2",
            "\\frac{1}{2}^2",
            "\\left(\\frac12\\right)^2",
        ],
    ),
    (
        "2x+3",
        [],
        [
            "2x+3=0",
            "2x+3, 5",
            "2x+3 or 5",
            "3x+2",
            "2x+3y",
            "2x+3 \\text{ or } 2x",
            "y>2x+3",
            "2x+3 = 5",
            "2x=-3",
            "|2x+3|",
            "2x+3\\%",
            "2x+3 thousand",
            "(2x+3)^2",
        ],
    ),
    (
        "(2,\\infty)",
        ["x>2", "2<x"],
        [
            "x\\ge2",
            "x>3",
            "2<x<3",
            "x<2",
            "x>2 \\text{ or } x<0",
            "[2,\\infty)",
            "(2,\\infty]",
            "2",
            "(2,\\infty)\\cup(0,1)",
            "x \\ne 2",
            "y>-2",
        ],
    ),
    ("50\\%", [], ["50", "5", "50\\text{ dollars}"]),
    ("(-\\infty,-1]", ["x \\le -1"], []),
    ("(-1,\\frac12)", ["-1 < x < \\frac{1}{2}"], []),
    ("[\\sqrt2,\\infty)", ["x\\ge\\sqrt{2}"], []),
    ("x \\le -1", ["(-\\infty,-1]"], []),
    ("\\frac13", ["0.\\overline{3}"], []),
    ("1000", ["1{,}000"], []),
    ("10000", ["10\\ 000"], []),
    ("12", ["12\\text{ ft}", "12\\,\\text{cm}^2", "12\\mathrm{~cm}"], []),
    ("12\\text{ cm}", ["12\\ \\mathrm{cm}"], []),
    ("Yes", ["\\text{Yes}"], []),
    ("1+2\\sqrt3", ["2\\sqrt{3}+1"], []),
    ("\\frac12", ["x = \\frac{1}{2}"], []),
    ("\\frac{\\sqrt{3}}{2}", ["\\frac{\\sqrt3}{2}", "\\sqrt{3}/2"], []),
    ("\\frac{3\\pi}{2}", ["3/2\\,\\pi"], []),
    ("(1,2),(3,4)", ["(1, 2), (3, 4)", "(3,4),(1,2)"], []),
    ("0.5", ["\\frac{1}{2}", "$\\frac12$"], []),
    (" 5", ["5 "], []),
    ("1500", ["1.5e3"], []),
    ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", ["\\begin{pmatrix}1\\\\2\\end{pmatrix}"], []),
    ("5\\%", ["5 \\%", "5%"], []),
    ("(-\\infty,2)", ["-\\infty < x < 2"], []),
    ("(-\\infty,\\infty)", ["\\mathbb{R}"], []),
    ("\\mathbb{R}", ["x\\in\\mathbb{R}"], []),
    ("-\\frac12", ["\\dfrac{-1}{2}"], []),
    ("7:30", ["7:30"], []),
    ("7:30\\text{ p.m.}", ["\\text{7:30 p.m.}"], []),
    ("25\\pi", ["25\\pi\\text{ cm}^2"], []),
    ("4000", ["4.0 \\times 10^{3}"], []),
    ("4 \\times 10^3", ["4\\times10^3"], []),
]
# {a} is the answer, {z} a zero-width space.
RIGHT_BOXES = r"""
\boxed{{{a}}}
\boxed {{{a}}}
\boxed{{ {a} }}
\boxed{{{a}.}}
\boxed{{${a}$}}
\boxed{{\({a}\)}}
\boxed{{\displaystyle {a}}}
\boxed{{\,{a}\,}}
\boxed{{{thin}{a}}}
\boxed{{{z}{a}{z}}}
\boxed{{{mark}{a}}}
\boxed{{{no_break}{a}}}
\boxed{{\boxed{{{a}}}}}
\fbox{{{a}}}
So it is $\boxed{{{a}}}$.
\[\boxed{{{a}}}\]
**\boxed{{{a}}}**
\boxed{{12345}}, no: \boxed{{{a}}}
<think>\boxed{{12345}}?</think> \boxed{{{a}}}
""".strip().splitlines()
WRONG_BOXES = r"""
{a}
\boxed{{}}
\boxed{{{a}
\boxed{{{a}, 12345}}
\boxed{{12345, {a}}}
\boxed{{{a} or 12345}}
\boxed{{{a} \text{{ or }} 12345}}
\boxed{{{a} \text{{ and }} 12345}}
\boxed{{{a}\text{{, maybe 12345}}}}
\boxed{{{a} \quad 12345}}
\boxed{{{a}; 12345}}
\boxed{{{a}\;12345}}
\boxed{{{a} \lor 12345}}
\boxed{{{a} \\ 12345}}
\boxed{{{a} = 12345}}
\boxed{{{a} \ne 12345}}
\boxed{{12345 \to {a}}}
\boxed{{{a} | 12345}}
\boxed{{{a} / 12345}}
\boxed{{{a}}}, or \boxed{{12345}}
\boxed{{{a} + 1}}
\boxed{{> {a}}}
\boxed{{\approx {a}}}
\boxed{{\text{{not }} {a}}}
\boxed{{\neg {a}}}
\boxed{{{a}\text{{ million}}}}
\boxed{{{a}\text{{ thousand}}}}
\boxed{{12345}}
\boxed{{?}}
\boxed{{\text{{none}}}}
<think>\boxed{{{a}}}
<think>\boxed{{{a}}}</think>
<think>\boxed{{{a}}}</think> \boxed{{12345}}
So \boxed{{{a}}}</think> I do not know.
\boxed{{{a}}} \boxed{{}}
""".strip().splitlines()


def boxed_cases() -> Iterator[Case]:
    for answer, _, _ in BOXED:
        values = {
            "a": answer,
            "z": "\u200b",
            "mark": "\ufeff",
            "no_break": "\u00a0",
            "thin": "\u2009",
        }
        for template in RIGHT_BOXES:
            yield template.format(**values), answer, True
        for template in WRONG_BOXES:
            yield template.format(**values), answer, False
    for answer, right, wrong in BOXED + MORE_BOXED:
        for field in right:
            yield rf"\boxed{{{field}}}", answer, True
        for field in wrong:
            yield rf"\boxed{{{field}}}", answer, False
